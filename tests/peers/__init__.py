"""Side by side with TRL and verl. Needs requirements.txt of this folder, and verl without its dependencies."""
