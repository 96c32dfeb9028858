"""Models as transformers writes them: a folder of config.json, tokenizer.json, *.safetensors."""
