"""GGUF files: their metadata become a model folder, their tensors a checkpoint."""
