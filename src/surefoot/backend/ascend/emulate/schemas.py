"""Published schemas of the emulated operators.

They are the registration strings of torch_npu 2.13.0, which is under the BSD 3-Clause licence,
Copyright (c) 2020, Huawei Technologies Co., Ltd. A test holds the emulation's signatures to them.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.backend.ascend.emulate.schemas_more import MORE_SCHEMAS

SCHEMAS: Mapping[str, str] = {
    **MORE_SCHEMAS,
    "npu_add_rms_norm": (
        "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> "
        "(Tensor, Tensor, Tensor)"
    ),
    "npu_attention_update": (
        "npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, "
        "Tensor)"
    ),
    "npu_fused_infer_attention_score": (
        "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? "
        "pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, "
        "SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, Tensor? "
        "quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? "
        "quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
        "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? "
        "value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? "
        "block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
        "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? "
        "actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
        "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int "
        'pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", int '
        "num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int "
        "antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, bool "
        "softmax_lse_flag=False) -> (Tensor, Tensor)"
    ),
    "npu_fused_infer_attention_score_v2": (
        "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, "
        "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? "
        "atten_mask=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, "
        "Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? "
        "dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? "
        "dequant_scale_value=None, Tensor? dequant_offset_value=None, Tensor? "
        "dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? "
        "quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int "
        "num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, int "
        'pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", int '
        "sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int "
        "value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, int? "
        "query_dtype=None, int? key_dtype=None, int? value_dtype=None, int? "
        "query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
        "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int? "
        "dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, int? "
        "dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> (Tensor, Tensor)"
    ),
    "npu_gemma_rms_norm": (
        "npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
    ),
    "npu_interleave_rope": ("npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor"),
    "npu_kv_rmsnorm_rope_cache": (
        "npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor "
        "index, Tensor k_cache, Tensor ckv_cache, *, Tensor? k_rope_scale=None, Tensor? "
        "c_kv_scale=None, Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, Tensor? "
        "v=None, float epsilon=1e-5, str cache_mode='Norm', bool is_output_kv=False) -> "
        "(Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_lightning_indexer": (
        "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? "
        "actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? "
        'block_table=None, str layout_query="BSND", str layout_key="BSND", int '
        "sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, int "
        "next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)"
    ),
    "npu_linear": "npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    "npu_rms_norm": (
        "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
    ),
    "npu_rotary_mul": (
        "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? "
        "rotate=None) -> Tensor"
    ),
    "npu_scatter_nd_update_": (
        "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)"
    ),
    "npu_scatter_pa_kv_cache": (
        "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) "
        "value_cache, Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? "
        "compress_seq_offsets=None, Tensor? seq_lens=None, str? cache_mode='PA_NZ') -> ()"
    ),
    "npu_sparse_flash_attention": (
        "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor "
        "sparse_indices, float scale_value, *, Tensor? block_table=None, Tensor? "
        "actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, Tensor? "
        "query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str "
        'layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, int '
        "pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int "
        "attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, "
        "Tensor, Tensor)"
    ),
    "npu_swiglu": ("npu_swiglu(Tensor input, int dim=-1) -> Tensor"),
}
