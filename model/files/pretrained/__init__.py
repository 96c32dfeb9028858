"""Models in transformers' format: a folder of config.json, tokenizer.json, *.safetensors."""
