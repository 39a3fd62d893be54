"""Who called what, and who still lives: headers, the guard, processes."""
