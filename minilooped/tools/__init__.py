"""Around a training: what it will take, and the way to other programs and back."""
