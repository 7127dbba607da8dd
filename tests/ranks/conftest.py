"""Every test of the ranks' machinery also proves that nothing of a run is left when it is over."""

from support.leftovers import marked, nothing_is_left  # noqa: F401
