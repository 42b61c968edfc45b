"""The laboratory: experiments of the literature as commands that run on the user's own model and task."""
