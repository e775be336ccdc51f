"""What happens when, in a training step."""
