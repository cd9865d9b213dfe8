//! Thoughts that are ended early are read as thoughts, and what follows as the answer, in every format.

use std::sync::Arc;

use super::answer_format::AnswerFormat;
use super::part::Answer;
use super::reasoning::{ReasoningFormat, ReasoningState, ThoughtMarkers};
use crate::sequence::Grammar;
use crate::text::template::TemplateTraits;

fn named(format: &str) -> AnswerFormat {
    let traits = TemplateTraits { format: Some(format.to_owned()), ..TemplateTraits::default() };
    AnswerFormat::new("", traits, |_| None)
}

/// What is read of an answer, and the number of pieces after which the text ends within thoughts.
fn read(format: &AnswerFormat, state: ReasoningState, pieces: &[&str]) -> (Answer, usize) {
    let tools = Arc::from([]);
    let mut parser = format.parser(&tools, None, state);
    let (mut answer, mut num_within) = (Answer::default(), 0);
    for piece in pieces {
        answer.extend(parser.push(piece));
        num_within += usize::from(parser.is_within_thoughts());
    }
    answer.end(parser.finish());
    (answer, num_within)
}

#[test]
fn ended_thoughts_are_thoughts_and_the_rest_is_the_answer() {
    for reasoning in ReasoningFormat::ALL {
        let template = format!("{}{}{}", reasoning.open, reasoning.close, reasoning.next_message);
        let format = AnswerFormat::new(&template, TemplateTraits::default(), |_| None);
        assert!(format.has_thoughts());
        for state in [ReasoningState::Possible(reasoning), ReasoningState::Started(reasoning)] {
            let ThoughtMarkers { open, end, reopens, .. } = format.thought_markers(state, false).unwrap();
            assert_eq!((open.is_empty(), reopens), (matches!(state, ReasoningState::Started(_)), false));
            let (answer, num_within) = read(&format, state, &[&open, "hm", "m", &end, "Yes."]);
            assert_eq!((&*answer.reasoning, &*answer.content), ("hmm", "Yes."), "{reasoning:?}");
            assert!((2..=3).contains(&num_within), "{reasoning:?}: {num_within}");
        }
        assert_eq!(format.thought_markers(ReasoningState::Off, false), None);
    }
}

#[test]
fn ended_messages_of_thoughts_are_followed_by_an_answer_or_by_a_header_of_the_model() {
    for name in ["harmony", "atem"] {
        let format = named(name);
        let ThoughtMarkers { open, close, end, reopens } = format.thought_markers(ReasoningState::Off, false).unwrap();
        assert!(reopens);
        let (answer, num_within) = read(&format, ReasoningState::Off, &[&open, "hm", "m", &end, "Yes."]);
        assert_eq!((&*answer.reasoning, &*answer.content, num_within), ("hmm", "Yes.", 3), "{name}");
        let before_call = format.thought_markers(ReasoningState::Off, true).unwrap().end;
        assert!(before_call.starts_with(close) && end.starts_with(&before_call) && end != before_call, "{name}");
        // A grammar of the answer has room for the thoughts and their end.
        let grammar = format.after_reasoning(ReasoningState::Off, Grammar::Regex("[0-9]".to_owned()));
        assert!(matches!(grammar, Grammar::Lark(_)));
    }
    assert!(!named("functionary").has_thoughts());
}
