"""Text from a trained model: weights out of a checkpoint, tokens out of the generated model's caches."""
