"""Quantized weights in safetensors checkpoints, by the method that config.json names.

Each method module finds the tensors that belong to one weight, and takes them apart. To everything else the weight is a
tensor of its usual name and shape.
"""
