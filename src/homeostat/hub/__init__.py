"""Models and datasets by their names on the Hugging Face hub, as folders on this disk."""
