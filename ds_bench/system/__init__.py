"""This machine: facts about it, and its processes, files and terminal."""
