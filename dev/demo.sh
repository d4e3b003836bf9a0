#!/bin/sh
# make demo: a GPT learns the King James Bible, byte by byte, on every CPU of this machine, and then writes in its style.
# The settings are those that reach a validation loss below 1.7 nats a byte in a few minutes on two cores. Sequences of 128 rather than
# 256 bytes: in shorter ones a model learns sooner to look back, in half as many bytes a step.
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-out/demo}
data=out/kjv.txt
fsdp=build/fsdp

mkdir -p out
if [ ! -s $data ]; then
    # Debian's bible-kjv prints a verse a line, with its place before it.
    bible -f gen1:1-rev22:21 | sed -E 's/^[1-3]?[A-Za-z]+[0-9]+:[0-9]+ //' >$data.tmp
    mv $data.tmp $data
fi

if [ -s "$out/model.safetensors" ]; then
    echo "demo: $out is trained already; rm -r $out begins anew"
elif [ -d "$out/checkpoints" ]; then
    echo "demo: going on with $out"
    $fsdp train --out "$out" --resume latest
else
    rm -rf "$out"
    $fsdp train --model gpt2-3m --data $data --out "$out" \
        --steps 1000 --seq 128 --batch 8 --micro-batch 4 --lr 2e-3 --warmup 50 --weight-decay 0.1 \
        --eval-every 250 --eval-batches 40 --save-every 250
fi

echo
echo "\$ fsdp generate --model $out --prompt 'In the beginning' --tokens 400"
$fsdp generate --model "$out" --prompt 'In the beginning' --tokens 400 --temperature 0.7 --top-k 40
echo
echo "The model is in $out: model.safetensors and config.json, as Hugging Face's loader opens them;"
echo "log.jsonl has every step. On: $fsdp eval --model $out --data $data"
