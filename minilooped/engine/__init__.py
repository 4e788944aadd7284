"""What a training stands on: its machine, its processes, its files. Nothing here knows how a model is trained."""
