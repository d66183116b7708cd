# One GPU, held for half an hour: the soak in the background, tests beside it. First call: soak.sh start COMMIT.
. .gpu/setup.sh
if [ "$1" = start ]; then export COMMIT=$2; mkdir -p /tmp/soak; setsid nohup python -m benchmarks soak --model llama-3.2-1b --minutes 29 --modes ours+lora --out /tmp/soak > /tmp/soak/log 2>&1 & sleep 5; fi
[ -n "$3" ] && N=8 tests 540 ${@:3}
ls -la /tmp/soak; cp /tmp/soak/*.jsonl $OUT/ 2>/dev/null; tail -3 /tmp/soak/log
