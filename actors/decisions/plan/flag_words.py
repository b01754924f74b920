"""Flags of llama-server that say nothing about memory: only how many words each one takes.

A word that belongs to one of them must not be read as a flag of its own.
"""

from __future__ import annotations

from typing import Final

_ONE_VALUE: Final = """
-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb
--cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -n
--predict --n-predict --keep --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale
--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -dt
--defrag-thold --rpc --numa -fitt --fit-target --override-kv --lora --lora-scaled
--control-vector --control-vector-scaled -m --model -mu --model-url -dr --docker-repo -hf -hfr
--hf-repo -hff --hf-file -hft --hf-token --log-file --log-colors -lv --verbosity --log-verbosity
--samplers -s --seed --sampler-seq --sampling-seq --temp --temperature --top-k --top-p --min-p
--top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p
--repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier
--dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target
--adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l
--logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file
--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft
--spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft
--spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll
--poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch
--prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --spec-draft-n-min
--spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min --spec-ngram-mod-n-min
--spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n
--spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft-min --draft-n-min
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits -lcs --lookup-cache-static -lcd
--lookup-cache-dynamic -cms --checkpoint-min-step -r --reverse-prompt --pooling
--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens -a --alias --tags --embd-normalize
--host --port --path --cors-origins --cors-methods --cors-headers --api-prefix --ui-config
--webui-config --ui-config-file --webui-config-file --tools --tools-runtime --mcp-servers-config
--mcp-servers-json --api-key --api-key-file --ssl-key-file --ssl-cert-file
--chat-template-kwargs -to --timeout --sse-ping-interval --threads-http --cache-reuse
--slot-save-path --media-path --models-dir --models-preset --models-max --reasoning-format -rea
--reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message --chat-template
--chat-template-file -sps --slot-prompt-similarity --sleep-idle-seconds --log-prompts-dir -lzm
--lazy-mode --spec-synth-len --spec-synth-rates --spec-draft-sampling --video-fps
--video-timestamp-interval --video-ffmpeg-dir
--preempt-ram
"""
ONE_VALUE: Final = frozenset(_ONE_VALUE.split())

TWO_VALUES: Final = frozenset({"--control-vector-layer-range"})

_PRESETS: Final = """
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default
--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default
--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default
"""
PRESETS: Final = frozenset(_PRESETS.split())
"""Each of these picks a model of its own, and some of them sizes as well."""
