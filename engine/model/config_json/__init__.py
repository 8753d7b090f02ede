"""Reading config.json: values, key names, layer patterns, rotary groups, quantization. Independent of any single family."""
