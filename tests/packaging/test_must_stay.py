"""The tests that `make test` must keep, so that it does not get faster by leaving out what counts."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LEAST_FROM_OUTSIDE = 60
"""Functions of tests/blackbox."""

MUST_STAY = {
    "the pointer never lies": {
        "schedules/test_pods_and_their_store.py": [
            "test_the_newest_pointer_never_lies_and_nothing_that_counts_is_deleted"
        ],
        "store/test_publish.py": [
            "test_in_which_order",
            "test_no_pointer_names_a_save_that_is_not_whole_any_more",
            "test_no_pointer_is_written_once_the_confirmation_is_too_old",
        ],
    },
    "the newest complete checkpoint is never deleted": {
        "decisions/test_disk_plan.py": [
            "test_promise_two_holds_for_any_disk",
            "test_what_never_goes_even_from_a_disk_without_a_byte",
        ],
        "decisions/test_store_retention.py": [
            "test_what_the_highest_pointer_names_stays_however_old",
            "test_a_save_stays_for_six_hours_after_another_replaced_it",
        ],
        "disk/test_remove.py": ["test_a_crash_at_any_point_leaves_a_whole_set_or_none"],
    },
    "no false restart, and none missed": {
        "detection/test_recorded_nights.py": [
            "test_a_healthy_night_gives_no_restart",
            "test_what_is_found_in_a_night_and_when",
        ],
        "blackbox/test_life.py": ["test_an_engine_that_dies_silently_is_healed_from_the_newest_checkpoint"],
    },
    "never two trainers": {
        "trainer/test_supervise.py": [
            "test_a_second_start_is_refused_in_the_same_and_in_another_state_directory",
            "test_killed_between_fork_and_exec_it_leaves_no_trainer_without_a_record",
        ],
        "decisions/test_lease_rules.py": ["test_each_rule"],
    },
    "podwatch is not in the blast radius": {
        "blackbox/test_life.py": ["test_training_outlives_its_podwatch_and_the_next_one_takes_it_over"],
        "trainer/test_supervise.py": ["test_a_disk_that_fills_up_loses_no_end_and_fails_no_print"],
    },
    "resume is prepared and confirmed": {
        "blackbox/test_world_size.py": [
            "test_another_number_waits_for_a_person_who_can_insist",
            "test_the_same_number_resumes",
        ],
        "decisions/test_starts.py": ["test_the_line_is_the_way_back_from_what_training_has_reached"],
    },
    "only what is ours": {
        "decisions/test_whose_process.py": [
            "test_each_tree_gets_its_answer",
            "test_nothing_of_another_user_or_at_an_operators_prompt_is_ever_signalled",
        ],
        "blackbox/test_beside.py": ["test_another_users_process_changes_nothing_and_is_left_alone"],
        "blackbox/test_trusted_files.py": ["test_a_configuration_that_another_user_could_choose"],
        "paths/test_attacks.py": ["test_what_is_put_there_between_judging_and_acting"],
    },
    "no secret is shown": {
        "domain/test_secrets.py": ["test_known_values_are_removed_wherever_they_stand"],
    },
    "every layout": {
        "checkpoints/test_golden.py": ["test_a_golden_set_is_whole", "test_complete_only_after_the_settle_time"],
        "store/test_restore_layouts.py": ["test_what_real_libraries_wrote"],
    },
    "every store": {
        "store/test_objects.py": [
            "test_a_document",
            "test_a_slice_of_a_file",
            "test_delete_means_every_version_and_nothing_else",
        ],
        "store/test_restore.py": ["test_a_fresh_pod_gets_the_same_files"],
    },
    "the outside is as it was agreed": {
        "packaging/test_contract.py": ["test_commands_options_and_arguments", "test_fields_of_documents", "test_names"],
        "blackbox/test_live_outside.py": ["test_metrics_documents_and_names_of_a_living_pod"],
    },
}
"""By what they hold. Who takes a name from here writes down in its place what holds that now."""

SLOW = re.compile(r"\bpytest\.mark\.slow\b")


@cache
def usual(file: Path) -> frozenset[str]:
    """The test functions of a file that `make test` runs."""
    module = ast.parse(file.read_text())
    whole = [
        node for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node).startswith("pytestmark")
    ]
    if any(SLOW.search(ast.unparse(node)) for node in whole):
        return frozenset()
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(
        node.name
        for node in functions
        if node.name.startswith("test_")
        and not any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in node.decorator_list)
    )


@pytest.mark.parametrize("what", MUST_STAY)
def test_what_holds_a_promise_is_part_of_make_test(what: str) -> None:
    missing = {file: sorted(set(names) - usual(TESTS / file)) for file, names in MUST_STAY[what].items()}
    assert {file: names for file, names in missing.items() if names} == {}


def test_so_many_functions_from_outside_are() -> None:
    found = {file.name: usual(file) for file in (TESTS / "blackbox").glob("test_*.py")}
    assert sum(map(len, found.values())) >= LEAST_FROM_OUTSIDE


def test_a_slow_test_and_a_slow_file_are_told_from_the_others(tmp_path: Path) -> None:
    text = "@pytest.mark.slow\ndef test_a(): ...\n@pytest.mark.root\ndef test_b(): ...\ndef test_c(): ...\n"
    (tmp_path / "some.py").write_text(text)
    (tmp_path / "none.py").write_text(f"pytestmark = [pytest.mark.root, pytest.mark.slow]\n{text}")
    assert usual(tmp_path / "some.py") == {"test_b", "test_c"}
    assert usual(tmp_path / "none.py") == set()
