"""One of several processes that train on a dataset with TRL: `python -m models.trl_program DATASET MODEL OUTPUT`.

Which one is said by the environment, as torchrun has it. Prints, as JSON, which samples were loaded for each step and
what was logged.
"""

from __future__ import annotations

import json
import sys

import torch
from models.trl_training import Recorder, first_token
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

MICRO_BATCH = 3  # of groups of two: every second group lies across the two processes


def main() -> None:
    dataset, model, output = sys.argv[1:]
    trainer = Recorder(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        first_token,
        args=GRPOConfig(
            output_dir=output,
            num_generations=2,
            per_device_train_batch_size=MICRO_BATCH,
            learning_rate=0.0,
            max_completion_length=None,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            num_train_epochs=2,
        ),
        rollouts=dataset,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    print(json.dumps({"loaded": trainer.loaded, "logged": trainer.state.log_history}))


if __name__ == "__main__":
    main()
