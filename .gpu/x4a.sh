# Four GPUs, first call (500 s): the target on four, then EP and TP decoding on two beside single-GPU rows on the others.
. .gpu/setup.sh; export COMMIT=$1
b 215 fsdp --gpus 4 --modes hf+liger+ac,ours+adamw+8bit+selective26,hf+liger,ours+adamw
( export CUDA_VISIBLE_DEVICES=0,1
  (cd .gpu/main && PYTHONPATH=$PWD:/tmp/site timeout 70 torchrun --standalone --nproc-per-node 2 ../ep.py ours+adamw+ep2 8192 12) > $OUT/ep-main.txt 2>&1
  timeout 70 torchrun --standalone --nproc-per-node 2 .gpu/ep.py ours+adamw+ep2 8192 12 > $OUT/ep-exchange.txt 2>&1
  b 60 decode --model llama-3-8b --batch 1x512 --modes ours+tp2
  b 110 fsdp --gpus 2 --model qwen3-30b-a3b --modes ours+adamw+bf16+inbackward+ep2,hf+liger+ac+bf16 ) &
( export CUDA_VISIBLE_DEVICES=2; python .gpu/seeds.py > $OUT/seeds.txt 2>&1
  b 120 rollout --batch 1024x512 --steps 1024 --modes ours; b 60 decode --model llama-3.2-3b --batch 256x512 --modes ours; b 60 decode --model llama-3-8b --batch 1x512 --modes ours ) &
( export CUDA_VISIBLE_DEVICES=3; b 40 train --model llama-3.2-1b --batch 1x512 --modes ours+adamw
  b 200 families --families gemma4 --modes hf,hf+liger,ours ) &
wait; rows; tail -40 $OUT/ep-main.txt; tail -40 $OUT/ep-exchange.txt; cat $OUT/seeds.txt
