"""Registry of all supported families. To add one: a file that describes it, and a line here.

Defaults follow the configuration classes of transformers 5.23, since checkpoints leave them out. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.model.families.baichuan import BAICHUAN
from windlass.engine.model.families.cohere import COHERE, COHERE2
from windlass.engine.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, MINICPM3, YOUTU
from windlass.engine.model.families.encoders import EUROBERT, MODERNBERT, NOMIC_BERT, ROFORMER
from windlass.engine.model.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from windlass.engine.model.families.exaone4 import EXAONE4
from windlass.engine.model.families.falcon import FALCON, FALCON_H1
from windlass.engine.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4, VAULT_GEMMA
from windlass.engine.model.families.glm import CHATGLM, GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE
from windlass.engine.model.families.gpt import BLOOM, CODEGEN, GPT2, GPTJ
from windlass.engine.model.families.gpt_oss import GPT_OSS
from windlass.engine.model.families.granite import GRANITE, GRANITE4, GRANITE_MOE, GRANITE_MOE_SHARED
from windlass.engine.model.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from windlass.engine.model.families.internlm import INTERNLM2, INTERNLM3
from windlass.engine.model.families.layer_norm_families import (
    GPT_NEOX,
    JAIS2,
    NEMOTRON,
    PERSIMMON,
    PHI,
    STABLELM,
    STARCODER2,
)
from windlass.engine.model.families.lfm2 import LFM2, LFM2_MOE
from windlass.engine.model.families.llama import LLAMA, LLAMA4
from windlass.engine.model.families.llama_variants import APERTUS, ARCEE, BITNET, CWM, HELIUM, SEED_OSS, SMOLLM3
from windlass.engine.model.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from windlass.engine.model.families.nanochat import NANOCHAT
from windlass.engine.model.families.nemotron_h import NEMOTRON_H
from windlass.engine.model.families.olmo import OLMO, OLMO2, OLMO3, OLMOE
from windlass.engine.model.families.phi import PHI3, PHI_MOE
from windlass.engine.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from windlass.engine.model.families.sigmoid_moe import AFMOE, DOTS1, MINIMAX_M2

FAMILIES = (
    LLAMA,
    LLAMA4,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    GEMMA3,
    GEMMA4,
    SMOLLM3,
    HELIUM,
    ERNIE4_5,
    GLM,
    GLM4,
    PHI3,
    HUNYUAN,
    GEMMA,
    GEMMA2,
    VAULT_GEMMA,
    OLMO2,
    OLMO3,
    EXAONE4,
    SEED_OSS,
    CWM,
    GRANITE,
    ARCEE,
    STARCODER2,
    STABLELM,
    PHI,
    NEMOTRON,
    GPT_NEOX,
    COHERE,
    COHERE2,
    OLMO,
    INTERNLM2,
    INTERNLM3,
    GPTJ,
    CODEGEN,
    FALCON,
    APERTUS,
    PERSIMMON,
    JAIS2,
    BITNET,
    NANOCHAT,
    BAICHUAN,
    CHATGLM,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GRANITE4,
    PHI_MOE,
    HUNYUAN_MOE,
    GPT_OSS,
    GLM4_MOE,
    DOTS1,
    MINIMAX_M2,
    ERNIE4_5_MOE,
    AFMOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    YOUTU,
    GLM4_MOE_LITE,
    MINICPM3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    FALCON_H1,
    GPT2,
    BLOOM,
    MODERNBERT,
    EUROBERT,
    ROFORMER,
    NOMIC_BERT,
)
