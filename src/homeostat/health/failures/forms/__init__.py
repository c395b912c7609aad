"""Message patterns by which libraries say what is wrong, grouped by who says it."""
