"""The demonstration models: tokenizer, data, training and saving, on a CPU or a GPU."""
