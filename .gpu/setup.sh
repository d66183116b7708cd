# Functions for a machine with GPUs: b LIMIT BENCHMARK... runs a benchmark, rows prints what it found.
[ -d /tmp/site ] || pip install -q --no-deps --root-user-action=ignore --target /tmp/site .whl/*.whl
export PYTHONPATH=$PWD:/tmp/site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p $OUT/r
b() { local t=$1 s=$(date +%s); shift; [ -n "$DEADLINE" ] && [ $((DEADLINE - s)) -lt $t ] && t=$((DEADLINE - s)); [ $t -lt 20 ] && { echo "== $* skipped"; return; }
timeout -k 5 $t python -m benchmarks "$@" --out $OUT/r >/dev/null 2>>$OUT/err.txt; echo "== $* rc=$? $(( $(date +%s) - s )) s"; }
rows() { cat $OUT/r/*.jsonl | python -c "
import sys,json
for l in sys.stdin:
    r=json.loads(l); print({k: v for k, v in r.items() if k not in ('benchmark','date','commit','versions','device','losses','times')} | {'error': r.get('error','')[:300]}, r.get('losses',[0])[:1])"; }
tests() { local s=$(date +%s); timeout -k 5 $1 python -m pytest -m gpu -p no:benchmark -p no:cacheprovider -v -n ${N:-20} --dist load --tb=short -o faulthandler_timeout=170 "${@:2}" > $OUT/pytest.txt 2>&1
echo "pytest rc=$? $(( $(date +%s) - s )) s"; grep -c PASSED $OUT/pytest.txt; grep "FAILED\|ERROR\|SKIPPED" $OUT/pytest.txt | head -20; tail -3 $OUT/pytest.txt; }
