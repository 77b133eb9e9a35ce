"""The operators of this project, one file for each or for a close family: declaration and eager implementation."""
