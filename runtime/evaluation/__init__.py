"""What a trained model can do: each measure is a function of a model's logits and of data."""
