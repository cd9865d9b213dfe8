use super::*;

#[test]
fn the_vocabulary_names_a_format_only_if_no_other_fits() {
    let of = |tokens: &[&str]| Format::of_vocabulary(|text| tokens.contains(&text)).map(Format::name);
    assert_eq!(of(&["<|tool_call_start|>", "<|tool_call_end|>"]), Some("lfm"));
    assert_eq!(of(&["<|tool_call|>", "<|/tool_call|>"]), Some("phi"));
    assert_eq!(of(&["<|tool_call|>"]), Some("granite"));
    assert_eq!(of(&["<tool_call>", "</tool_call>"]), None);
    assert_eq!(of(&["<|im_start|>"]), None);
}
