"""A function that nobody marked."""


def plain(rewards):
    """Has no @node."""
