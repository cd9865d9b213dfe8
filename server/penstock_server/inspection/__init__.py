"""Describes a model without loading it: `reference` finds its files, `layout` compares its tensors with the model that
config.json describes, and `text` looks at its tokenizer and chat template."""
