"""``podwatch controller``: replaces a dead pod through provider commands, within caps (docs/controller.md)."""
