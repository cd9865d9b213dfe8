"""What a model is, said without loading it: `source` finds its files, `layout` holds them against the model that its
config.json describes, `text` looks at tokenizer and templates, `report` puts it into words."""
