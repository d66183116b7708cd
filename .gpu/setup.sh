# Functions for a machine with GPUs: b LIMIT BENCHMARK... runs a benchmark, rows prints what it found.
[ -d /tmp/site ] || pip install -q --no-deps --root-user-action=ignore --target /tmp/site .whl/*.whl
export PYTHONPATH=$PWD:/tmp/site PYTHONUNBUFFERED=1
mkdir -p $OUT/r
b() { local t=$1 s=$(date +%s); shift; timeout -k 5 $t python -m benchmarks "$@" --out $OUT/r >/dev/null 2>>$OUT/err.txt; echo "== $* rc=$? $(( $(date +%s) - s )) s"; }
rows() { cat $OUT/r/*.jsonl | python -c "
import sys,json
for l in sys.stdin:
    r=json.loads(l); print(r.get('model'),r.get('batch'),r.get('gpus'),r['mode'],r.get('tokens_per_s'),r.get('step_ms') or r.get('seconds'),r.get('step_ms_range'),r.get('peak_gib'),r.get('floor_ms'),r.get('first_step_s'),r.get('losses',[0])[:1],r.get('error','')[:300])"; }
tests() { local s=$(date +%s); timeout -k 5 $1 python -m pytest -m gpu -p no:benchmark -p no:cacheprovider -v -n ${N:-20} --dist load --tb=short -o faulthandler_timeout=170 "${@:2}" > $OUT/pytest.txt 2>&1
echo "pytest rc=$? $(( $(date +%s) - s )) s"; grep -c PASSED $OUT/pytest.txt; grep "FAILED\|ERROR\|SKIPPED" $OUT/pytest.txt | head -20; tail -3 $OUT/pytest.txt; }
