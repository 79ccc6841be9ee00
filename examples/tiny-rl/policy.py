"""The policy and its environment: a 5 x 5 grid, walk to the goal, REINFORCE.

Everything random is a function of (seed, step) and the weights, so a run that was interrupted and resumed must end in
the same weights, bit for bit, as one that was not.
"""

import torch
from torch import nn

SIZE = 5
MAX_MOVES = 12
EPISODES = 48
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


def make_deterministic() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def make_policy(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def play(policy: nn.Module, seed: int, step: int) -> dict[str, torch.Tensor]:
    """Play one batch of episodes. Returns observations (T, E, 4), actions (T, E), alive (T, E) and rewards (E,)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    position = torch.randint(0, SIZE, (EPISODES, 2), generator=generator)
    goal = torch.randint(0, SIZE, (EPISODES, 2), generator=generator)
    reward = torch.zeros(EPISODES)
    alive = (position != goal).any(1)
    observations, actions, alives = [], [], []
    with torch.no_grad():
        for _ in range(MAX_MOVES):
            seen = torch.cat([position, goal], 1).float() / SIZE - 0.5
            action = torch.multinomial(torch.softmax(policy(seen), 1), 1, generator=generator).squeeze(1)
            observations.append(seen)
            actions.append(action)
            alives.append(alive)
            moved = (position + MOVES[action]).clamp(0, SIZE - 1)
            position = torch.where(alive[:, None], moved, position)
            reward = reward - 0.05 * alive
            arrived = alive & (position == goal).all(1)
            reward = reward + arrived.float()
            alive = alive & ~arrived
    return {
        "observations": torch.stack(observations),
        "actions": torch.stack(actions),
        "alive": torch.stack(alives),
        "rewards": reward,
    }


def reinforce_loss(policy: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """-E[advantage * log pi(action)], the advantage being the reward's deviation from the batch mean."""
    log_probs = torch.log_softmax(policy(batch["observations"]), -1)
    chosen = log_probs.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    advantage = (batch["rewards"] - batch["rewards"].mean()) / (batch["rewards"].std() + 1e-6)
    return -(chosen * batch["alive"] * advantage).sum() / batch["alive"].sum().clamp(min=1)
