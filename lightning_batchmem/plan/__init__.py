"""Pure arithmetic: trials, lines, the next size or the plan. Standard library only."""
