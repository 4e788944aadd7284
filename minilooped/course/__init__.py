"""What the notebooks show and ask: plots, widgets, and the checkers of the exercises."""
