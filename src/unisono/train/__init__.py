"""The main job: a small transformer trained on a real text by torch's own DDP, on a backend named by one word."""
