//! Compiling grammars on whatever workers there are: while they are being restarted, or sequences are tried alone, it waits for
//! the next ones. So a loss during a trial is never a grammar's doing.

use tokio::sync::watch;

use super::MAX_LOSSES;
use crate::sequence::{Grammar, GrammarError, SequenceFailure};
use crate::worker::GrammarCompiler;

/// Where grammars can be compiled now.
#[derive(Clone, Debug)]
pub(super) enum Compiler {
    Ready(GrammarCompiler),
    /// Until the workers are back, and nobody is suspected any more.
    Restarting,
    /// For ever, for this reason.
    Gone(String),
}

pub(super) async fn compile(mut compiler: watch::Receiver<Compiler>, grammar: Grammar) -> Result<(), GrammarError> {
    let mut num_tries = 0;
    loop {
        let ready = ready(&mut compiler).await?;
        num_tries += 1;
        match ready.compile(&grammar).await {
            Ok(compiled) => return compiled.map_err(GrammarError::Invalid),
            Err(error) if num_tries < MAX_LOSSES && error.is_loss() => {
                // The engine finds the same, if it has not already; an error means that it has ended.
                let _ = compiler.changed().await;
            }
            Err(error) => return Err(GrammarError::Worker(error.to_string())),
        }
    }
}

async fn ready(compiler: &mut watch::Receiver<Compiler>) -> Result<GrammarCompiler, GrammarError> {
    let settled = compiler.wait_for(|compiler| !matches!(compiler, Compiler::Restarting)).await;
    match settled.as_deref() {
        Ok(Compiler::Ready(compiler)) => Ok(compiler.clone()),
        Ok(Compiler::Gone(reason)) => Err(GrammarError::Worker(reason.clone())),
        Ok(Compiler::Restarting) | Err(_) => Err(GrammarError::Worker(SequenceFailure::ShuttingDown.to_string())),
    }
}
