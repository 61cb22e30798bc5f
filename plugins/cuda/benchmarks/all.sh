#!/bin/bash
# Everything that needs a GPU, in one go: measurements, random cases, sanitizers, large offsets.
# Usage: all.sh FOLDER; run from here with sconv and sconv_cuda importable.
out=${1:?a folder for the results}
export PYTHONUNBUFFERED=1
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
timeout 150 python3 bench.py --json "$out/bench.json" 2>&1 | cut -c1-200
timeout 30 python3 bench.py --tune --only metadata --match extend --json "$out/metadata.json" 2>&1 | cut -c1-220
timeout 40 python3 bench.py --only layouts --json "$out/layouts.json" 2>&1 | tail -30
timeout 150 python3 check.py --cases 1000 --json "$out/check.json" 2>&1 | cut -c1-900 | tail -12
timeout 40 python3 large_pool.py 2>&1 | tail -8
timeout 40 python3 sanitize.py 2>&1 | tail -3
for tool in memcheck racecheck; do
    SCONV_BENCH_SERIAL=1 timeout 90 "$sanitizer" --tool $tool --error-exitcode 9 python3 sanitize.py 2>&1 |
        tail -4 | tee "$out/$tool.txt"
done
timeout 40 python3 bench.py --only warmup --json "$out/warmup.json" 2>&1 | tail -1
timeout 60 python3 two_gpus.py 2>&1 | tail -3
