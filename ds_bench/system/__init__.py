"""This machine: facts about it, without judging them, and its processes, files and terminal."""
