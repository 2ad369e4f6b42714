pip install -q --no-index --no-deps --target /tmp/site .carry/wheels/*.whl 2>/dev/null; rm -rf /tmp/site/numpy; export PYTHONPATH=/tmp/site
nvidia-smi -L
for r in 1 2; do
for d in .carry/old .; do (cd $d; echo "== $d"; timeout 100 python3 -m benchmarks coldstart --sizes 20000x25000,100000x100000 | tail -4); done; done
