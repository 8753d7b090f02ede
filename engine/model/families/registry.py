"""Every supported family. To add one: a file that describes it, and a line here.

Defaults follow the configuration classes of transformers 5.23, since checkpoints leave them out. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.model.families.baichuan import BAICHUAN
from windlass.engine.model.families.chatglm import CHATGLM
from windlass.engine.model.families.cohere import COHERE, COHERE2
from windlass.engine.model.families.encoders import EUROBERT, MODERNBERT, NOMIC_BERT, ROFORMER
from windlass.engine.model.families.ernie4_5 import ERNIE4_5
from windlass.engine.model.families.exaone4 import EXAONE4
from windlass.engine.model.families.falcon import FALCON
from windlass.engine.model.families.falcon_h1 import FALCON_H1
from windlass.engine.model.families.gated_delta import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from windlass.engine.model.families.gemma import GEMMA, GEMMA2, VAULT_GEMMA
from windlass.engine.model.families.gemma3 import GEMMA3
from windlass.engine.model.families.gemma4 import GEMMA4
from windlass.engine.model.families.glm import GLM, GLM4
from windlass.engine.model.families.gptj import CODEGEN, GPTJ
from windlass.engine.model.families.granite4 import GRANITE4
from windlass.engine.model.families.helium import HELIUM
from windlass.engine.model.families.hunyuan import HUNYUAN
from windlass.engine.model.families.internlm import INTERNLM2, INTERNLM3
from windlass.engine.model.families.latent_attention import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MINICPM3,
    YOUTU,
)
from windlass.engine.model.families.layer_norms import GPT_NEOX, JAIS2, NEMOTRON, PERSIMMON, PHI, STABLELM, STARCODER2
from windlass.engine.model.families.lfm2 import LFM2, LFM2_MOE
from windlass.engine.model.families.llama import LLAMA
from windlass.engine.model.families.llama4 import LLAMA4
from windlass.engine.model.families.llama_like import APERTUS, ARCEE, BITNET, CWM, GRANITE, SEED_OSS
from windlass.engine.model.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from windlass.engine.model.families.nanochat import NANOCHAT
from windlass.engine.model.families.nemotron_h import NEMOTRON_H
from windlass.engine.model.families.olmo import OLMO, OLMO2, OLMO3
from windlass.engine.model.families.phi3 import PHI3
from windlass.engine.model.families.qwen import QWEN2, QWEN3
from windlass.engine.model.families.sigmoid_experts import AFMOE, DOTS1, ERNIE4_5_MOE, GLM4_MOE, MINIMAX_M2
from windlass.engine.model.families.smollm3 import SMOLLM3
from windlass.engine.model.families.softmax_experts import (
    GPT_OSS,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    HUNYUAN_MOE,
    MIXTRAL,
    OLMOE,
    PHI_MOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from windlass.engine.model.families.unrotated import BLOOM, GPT2

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
