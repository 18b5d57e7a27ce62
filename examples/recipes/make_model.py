"""Make a Hugging Face folder of a Llama model from its GGUF file: make_model.py FILE FOLDER

Weights of 4 bits become float32: slightly rounded ones, the same for everybody.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "transformers_version")


def main(file: Path, folder: Path) -> None:
    origin, name = str(file.parent), file.name
    tokenizer = AutoTokenizer.from_pretrained(origin, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(origin, gguf_file=name, dtype=torch.float32)
    settings = {key: value for key, value in read.config.to_dict().items() if key not in NOT_OF_THE_MODEL}
    model = LlamaForCausalLM(LlamaConfig(**settings))  # a model that was read from GGUF refuses to be saved
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
