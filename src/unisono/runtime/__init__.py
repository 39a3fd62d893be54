"""What moves data: lanes, programs, reductions."""
