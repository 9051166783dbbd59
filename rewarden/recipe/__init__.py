"""Reading, showing and running recipes; see docs/recipes.md."""
