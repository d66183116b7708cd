# Four GPUs, first call (570 s): the target on four, then EP and TP decoding on two beside single-GPU rows on the others.
DEADLINE=$(( $(date +%s) + 560 ))
. .gpu/setup.sh; export COMMIT=$1
b 130 fsdp --gpus 4 --modes hf+liger+ac,ours+adamw+8bit+selective26
rows
( export CUDA_VISIBLE_DEVICES=0,1
  s=$(date +%s)
  (cd .gpu/main && PYTHONPATH=$PWD:/tmp/site timeout 70 torchrun --standalone --nproc-per-node 2 ../ep.py ours+adamw+ep2 8192 12) > $OUT/ep-main.txt 2>&1
  timeout 70 torchrun --standalone --nproc-per-node 2 .gpu/ep.py ours+adamw+ep2 8192 12 > $OUT/ep-exchange.txt 2>&1
  echo "ep $(( $(date +%s) - s )) s"
  b 60 decode --model llama-3-8b --batch 1x512 --modes ours+tp2
  b 140 fsdp --gpus 2 --model qwen3-30b-a3b --modes ours+adamw+bf16+inbackward+ep2,hf+liger+ac+bf16
  pip install -q --no-deps --root-user-action=ignore --target /tmp/titan .gpu/titan/*.whl; tar xJf .gpu/trl2.tar.xz -C /tmp
  PYTHONPATH=$PWD:/tmp/site:/tmp/titan:/tmp/trl2/site-packages b 240 fsdp --gpus 2 --modes titan+compile,ours+adamw,hf+liger+compile ) > $OUT/l01.txt 2>&1 &
( export CUDA_VISIBLE_DEVICES=2; timeout 40 python .gpu/seeds.py > $OUT/seeds.txt 2>&1
  b 90 decode --model llama-3-8b --batch 1x512 --modes ours,ours+nf4,ours+lora+nf4
  b 120 rollout --batch 1024x512 --steps 1024 --modes ours
  b 40 decode --model llama-3.2-3b --batch 256x512 --modes ours
  mkdir -p /tmp/t; tar xJf .gpu/trl2.tar.xz -C /tmp/t; PYTHONPATH=$PWD:/tmp/t/trl2/site-packages:/tmp/site b 240 grpo --batch 256x256 --steps 512 --modes ours,trl ) > $OUT/l2.txt 2>&1 &
( export CUDA_VISIBLE_DEVICES=3; b 40 train --model llama-3.2-1b --batch 1x512 --modes ours+adamw
  b 200 families --families gemma4 --modes hf,hf+liger,ours
  b 90 longest --memory 24 --lengths 118016 --modes ours+lora+nf4+full+offload
  b 100 longest --memory 80 --layers 2 --lengths 514048 --modes ours+lora+nf4+full+offload
  b 60 ops --ops gated_delta_rule_packed --peers ours ) > $OUT/l3.txt 2>&1 &
wait; cat $OUT/l01.txt $OUT/l2.txt $OUT/l3.txt; rm $OUT/l*.txt; cat $OUT/seeds.txt; head -14 $OUT/ep-main.txt; head -14 $OUT/ep-exchange.txt; rows; cat $OUT/r/*.jsonl > $OUT/rows.jsonl; tail -c 1500 $OUT/err.txt; cat $OUT/ep*.txt $OUT/err.txt > $OUT/other.txt; rm -r $OUT/r $OUT/ep*.txt $OUT/err.txt $OUT/seeds.txt
