"""Files of models from the Hugging Face Hub, and folders that are made from models."""
