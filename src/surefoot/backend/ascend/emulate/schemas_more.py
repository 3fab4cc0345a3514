"""Published schemas of the emulated operators for eight bits, experts and recurrences.

They are the registration strings of torch_npu 2.13.0, which is under the BSD 3-Clause licence,
Copyright (c) 2020, Huawei Technologies Co., Ltd. A test holds the emulation's signatures to them.
"""

from __future__ import annotations

from collections.abc import Mapping

MORE_SCHEMAS: Mapping[str, str] = {
    "npu_chunk_gated_delta_rule": (
        "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, Tensor? "
        "beta=None, Tensor? initial_state=None, Tensor? actual_seq_lengths=None, float? "
        "scale=None, Tensor? g=None) -> (Tensor, Tensor)"
    ),
    "npu_dequant_swiglu_quant": (
        "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? "
        "activation_scale=None, Tensor? bias=None, Tensor? quant_scale=None, Tensor? "
        "quant_offset=None, Tensor? group_index=None, bool activate_left=False, int "
        "quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, int "
        "swiglu_mode=0, float clamp_limit=7.0, float glu_alpha=1.702, float glu_bias=1.0) -> "
        "(Tensor, Tensor)"
    ),
    "npu_dynamic_quant": (
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? "
        'group_index=None, int? dst_type=None, str quant_mode="pertoken", float '
        "dst_type_max=0.0) -> (Tensor, Tensor)"
    ),
    "npu_fused_causal_conv1d": (
        "npu_fused_causal_conv1d(Tensor x, Tensor weight, Tensor(a!) conv_states, *, Tensor? "
        "query_start_loc=None, Tensor? cache_indices=None, Tensor? initial_state_mode=None, "
        'Tensor? bias=None, Tensor? num_accepted_tokens=None, str? activation="None", int? '
        "pad_slot_id=-1, int? run_mode=0, int? residual_connection=0, int? max_query_len=-1, "
        "Tensor? num_computed_tokens=None, Tensor? block_idx_first_scheduled_token=None, "
        "Tensor? block_idx_last_scheduled_token=None, Tensor? initial_state_idx=None, int? "
        'block_size=128, str? conv_mode="default") -> Tensor'
    ),
    "npu_grouped_matmul": (
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? "
        "scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? "
        "antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, "
        "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, Tensor[]? "
        "activation_quant_offset=None, int? split_item=0, int? group_type=None, int? "
        "group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? "
        "output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    "npu_moe_finalize_routing": (
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? "
        "skip2, Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? "
        "export_for_source_row, int? drop_pad_mode=0, int? k=1) -> Tensor"
    ),
    "npu_moe_gating_top_k": (
        "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int "
        "renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
        "float eps=1e-20) -> (Tensor, Tensor, Tensor)"
    ),
    "npu_moe_gating_top_k_softmax": (
        "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, "
        "Tensor, Tensor)"
    ),
    "npu_moe_init_routing_v2": (
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? "
        "offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, int "
        "drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, int? "
        "x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_moe_token_unpermute": (
        "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? "
        "probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor"
    ),
    "npu_quant_matmul": (
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? "
        "pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
        "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? "
        "group_sizes=None, Tensor? y_scale=None) -> Tensor"
    ),
    "npu_quantize": (
        "npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int "
        "axis=1, bool div_mode=True) -> Tensor"
    ),
    "npu_recurrent_gated_delta_rule": (
        "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) "
        "state, *, Tensor? beta=None, float? scale=None, Tensor? actual_seq_lengths=None, "
        "Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, "
        "Tensor? gk=None) -> Tensor"
    ),
}
