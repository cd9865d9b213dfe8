//! Rewrites a template's syntax tree, so that its operators are our functions, which work as Python's do: minijinja has
//! its own rules for them, and no hooks (docs/adr/chat-templates.md).

use std::collections::HashMap;

use minijinja::Value;
use minijinja::machinery::Span;
use minijinja::machinery::ast::{
    BinOp, BinOpKind, Block, Call, CallArg, CallBlock, Compare, CompareOpKind, Const, EmitExpr, EmitRaw, Expr, Filter,
    FilterBlock, ForLoop, GetAttr, IfCond, IfExpr, List, Macro, Map, Set, SetBlock, Slice, Spanned, Stmt, Template,
    Test, UnaryOp, UnaryOpKind, Var, WithBlock,
};

use super::error::TemplateError;
use super::operator;

/// Prefix of hidden parameters of macros: whether the caller has passed a parameter.
const PASSED: &str = "passed ";

/// The tree of a template with calls instead of operators.
pub(super) fn rewritten<'a>(source: &'a str, tree: &Stmt<'a>) -> Result<Stmt<'a>, TemplateError> {
    let mut rewriter = Rewriter { source, macros: HashMap::new() };
    if let Stmt::Template(template) = tree {
        rewriter.find_macros(&template.children);
    }
    rewriter.statement(tree)
}

struct Rewriter<'a> {
    source: &'a str,
    /// The parameters of the template's macros, and the hidden parameters of those that have a default.
    macros: HashMap<&'a str, Vec<(&'a str, Option<&'a str>)>>,
}

fn unsupported(construct: &str, span: Span) -> TemplateError {
    TemplateError::Invalid(format!("{construct} is not supported in a chat template (line {})", span.start_line))
}

fn var<'a>(id: &'a str, span: Span) -> Expr<'a> {
    Expr::Var(Spanned::new(Var { id }, span))
}

fn constant<'a>(value: impl Into<Value>, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(Const { value: value.into() }, span))
}

fn call<'a>(function: &'static str, arguments: Vec<Expr<'a>>, span: Span) -> Expr<'a> {
    let args = arguments.into_iter().map(CallArg::Pos).collect();
    Expr::Call(Spanned::new(Call { expr: var(function, span), args }, span))
}

impl<'a> Rewriter<'a> {
    fn find_macros(&mut self, statements: &[Stmt<'a>]) {
        for statement in statements {
            match statement {
                Stmt::Macro(declared) => {
                    let first_default = declared.args.len() - declared.defaults.len();
                    let parameters = declared.args.iter().enumerate().filter_map(|(index, argument)| match argument {
                        Expr::Var(parameter) => {
                            // A macro is declared once for each template, and a template once for each process.
                            let hidden = || &*format!("{PASSED}{}", parameter.id).leak();
                            Some((parameter.id, (index >= first_default).then(hidden)))
                        }
                        _ => None,
                    });
                    self.macros.insert(declared.name, parameters.collect());
                    self.find_macros(&declared.body);
                }
                Stmt::IfCond(branch) => {
                    self.find_macros(&branch.true_body);
                    self.find_macros(&branch.false_body);
                }
                Stmt::ForLoop(repeated) => self.find_macros(&repeated.body),
                _ => {}
            }
        }
    }

    fn statements(&self, statements: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, TemplateError> {
        statements.iter().map(|statement| self.statement(statement)).collect()
    }

    fn statement(&self, statement: &Stmt<'a>) -> Result<Stmt<'a>, TemplateError> {
        Ok(match statement {
            Stmt::Template(s) => {
                Stmt::Template(Spanned::new(Template { children: self.statements(&s.children)? }, s.span()))
            }
            Stmt::EmitExpr(s) => Stmt::EmitExpr(Spanned::new(EmitExpr { expr: self.expression(&s.expr) }, s.span())),
            Stmt::EmitRaw(s) => Stmt::EmitRaw(Spanned::new(EmitRaw { raw: s.raw }, s.span())),
            Stmt::ForLoop(s) => {
                let iter = call(operator::LOOP, vec![self.expression(&s.iter)], s.iter.span());
                let repeated = ForLoop {
                    target: self.target(&s.target),
                    iter,
                    filter_expr: s.filter_expr.as_ref().map(|filter| self.expression(filter)),
                    recursive: s.recursive,
                    body: self.statements(&s.body)?,
                    else_body: self.statements(&s.else_body)?,
                };
                Stmt::ForLoop(Spanned::new(repeated, s.span()))
            }
            Stmt::IfCond(s) => {
                let branch = IfCond {
                    expr: self.expression(&s.expr),
                    true_body: self.statements(&s.true_body)?,
                    false_body: self.statements(&s.false_body)?,
                };
                Stmt::IfCond(Spanned::new(branch, s.span()))
            }
            Stmt::WithBlock(s) => {
                let assignments = s.assignments.iter().map(|(to, from)| (self.target(to), self.expression(from)));
                let block = WithBlock { assignments: assignments.collect(), body: self.statements(&s.body)? };
                Stmt::WithBlock(Spanned::new(block, s.span()))
            }
            Stmt::Set(s) => {
                let set = Set { target: self.target(&s.target), expr: self.expression(&s.expr) };
                Stmt::Set(Spanned::new(set, s.span()))
            }
            Stmt::SetBlock(s) => {
                let set = SetBlock {
                    target: self.target(&s.target),
                    filter: s.filter.as_ref().map(|filter| self.expression(filter)),
                    body: self.statements(&s.body)?,
                };
                Stmt::SetBlock(Spanned::new(set, s.span()))
            }
            Stmt::FilterBlock(s) => {
                let block = FilterBlock { filter: self.expression(&s.filter), body: self.statements(&s.body)? };
                Stmt::FilterBlock(Spanned::new(block, s.span()))
            }
            Stmt::Block(s) => {
                let block = Block { name: s.name, required: s.required, body: self.statements(&s.body)? };
                Stmt::Block(Spanned::new(block, s.span()))
            }
            Stmt::Macro(s) => Stmt::Macro(self.declared(s)?),
            Stmt::CallBlock(s) => {
                let block = CallBlock { call: self.called(&s.call), macro_decl: self.declared(&s.macro_decl)? };
                Stmt::CallBlock(Spanned::new(block, s.span()))
            }
            Stmt::Continue(s) => Stmt::Continue(Spanned::new(minijinja::machinery::ast::Continue, s.span())),
            Stmt::Break(s) => Stmt::Break(Spanned::new(minijinja::machinery::ast::Break, s.span())),
            Stmt::AutoEscape(s) => return Err(unsupported("the tag autoescape", s.span())),
            Stmt::Import(s) => return Err(unsupported("the tag import", s.span())),
            Stmt::FromImport(s) => return Err(unsupported("the tag from", s.span())),
            Stmt::Extends(s) => return Err(unsupported("the tag extends", s.span())),
            Stmt::Include(s) => return Err(unsupported("the tag include", s.span())),
            Stmt::Do(s) => return Err(unsupported("the tag do", s.span())),
        })
    }

    /// In jinja, a default may name the parameters before it, and it is not used for an undefined value that is passed.
    fn declared(&self, declared: &Spanned<Macro<'a>>) -> Result<Spanned<Macro<'a>>, TemplateError> {
        let span = declared.span();
        let hidden = self.macros.get(declared.name).into_iter().flatten().filter_map(|(_, hidden)| *hidden);
        let parameters = &declared.args[declared.args.len() - declared.defaults.len()..];
        let mut body = Vec::new();
        let mut hidden_parameters = Vec::new();
        for ((parameter, default), hidden) in parameters.iter().zip(&declared.defaults).zip(hidden) {
            let set = Set { target: self.target(parameter), expr: self.expression(default) };
            // Of a call with *args or **kwargs, or of a macro under another name, only the value is known.
            let not_passed = UnaryOp { op: UnaryOpKind::Not, expr: var(hidden, span) };
            let is_not_passed = Expr::UnaryOp(Spanned::new(not_passed, span));
            let test = Test { name: "undefined", expr: self.target(parameter), args: Vec::new() };
            let is_undefined = Expr::Test(Spanned::new(test, span));
            let both = BinOp { op: BinOpKind::ScAnd, left: is_not_passed, right: is_undefined };
            let is_missing = IfCond {
                expr: Expr::BinOp(Spanned::new(both, span)),
                true_body: vec![Stmt::Set(Spanned::new(set, span))],
                false_body: Vec::new(),
            };
            body.push(Stmt::IfCond(Spanned::new(is_missing, span)));
            hidden_parameters.push(var(hidden, span));
        }
        let is_rewritten = hidden_parameters.len() == declared.defaults.len();
        body.extend(self.statements(&declared.body)?);
        let args = declared.args.iter().map(|argument| self.target(argument)).chain(hidden_parameters).collect();
        let defaults = declared.defaults.iter().filter(|_| !is_rewritten).map(|default| self.expression(default));
        Ok(Spanned::new(Macro { name: declared.name, args, defaults: defaults.collect(), body }, span))
    }

    /// What a statement assigns to.
    fn target(&self, target: &Expr<'a>) -> Expr<'a> {
        let span = target.span();
        match target {
            Expr::Var(name) => var(name.id, span),
            Expr::List(list) => {
                let items = list.items.iter().map(|item| self.target(item)).collect();
                Expr::List(Spanned::new(List { items }, span))
            }
            Expr::GetAttr(attribute) => {
                let expr = self.target(&attribute.expr);
                Expr::GetAttr(Spanned::new(GetAttr { expr, name: attribute.name }, span))
            }
            other => self.expression(other),
        }
    }

    fn expressions(&self, expressions: &[Expr<'a>]) -> Vec<Expr<'a>> {
        expressions.iter().map(|expression| self.expression(expression)).collect()
    }

    fn expression(&self, expression: &Expr<'a>) -> Expr<'a> {
        let span = expression.span();
        match expression {
            Expr::Var(name) => var(name.id, span),
            Expr::Const(value) => constant(value.value.clone(), span),
            Expr::Slice(slice) => self.slice(slice, span),
            Expr::UnaryOp(unary) => self.unary(unary, span),
            Expr::BinOp(binary) => self.binary(binary, span),
            Expr::Compare(comparison) => self.comparison(comparison, span),
            Expr::IfExpr(branch) => {
                let branch = IfExpr {
                    test_expr: self.expression(&branch.test_expr),
                    true_expr: self.expression(&branch.true_expr),
                    false_expr: branch.false_expr.as_ref().map(|expression| self.expression(expression)),
                };
                Expr::IfExpr(Spanned::new(branch, span))
            }
            Expr::Filter(filter) => {
                let expr = filter.expr.as_ref().map(|expression| self.expression(expression));
                Expr::Filter(Spanned::new(Filter { name: filter.name, expr, args: self.arguments(&filter.args) }, span))
            }
            Expr::Test(test) => {
                let expr = self.expression(&test.expr);
                Expr::Test(Spanned::new(Test { name: test.name, expr, args: self.arguments(&test.args) }, span))
            }
            Expr::GetAttr(attribute) => {
                call(operator::ATTRIBUTE, vec![self.expression(&attribute.expr), constant(attribute.name, span)], span)
            }
            Expr::GetItem(item) => {
                call(operator::ITEM, vec![self.expression(&item.expr), self.expression(&item.subscript_expr)], span)
            }
            Expr::Call(called) => Expr::Call(self.called(called)),
            Expr::List(list) => {
                let items = self.expressions(&list.items);
                // minijinja parses a tuple as a list.
                let is_list = self.source.get(span.start_offset as usize..).is_some_and(|text| text.starts_with('['));
                if is_list {
                    Expr::List(Spanned::new(List { items }, span))
                } else {
                    call(operator::TUPLE, items, span)
                }
            }
            Expr::Map(map) => {
                let map = Map { keys: self.expressions(&map.keys), values: self.expressions(&map.values) };
                Expr::Map(Spanned::new(map, span))
            }
        }
    }

    fn slice(&self, slice: &Slice<'a>, span: Span) -> Expr<'a> {
        let bound = |bound: &Option<Expr<'a>>| {
            bound.as_ref().map_or_else(|| constant((), span), |bound| self.expression(bound))
        };
        let bounds = [&slice.start, &slice.stop, &slice.step].map(bound);
        call(operator::SLICE, std::iter::once(self.expression(&slice.expr)).chain(bounds).collect(), span)
    }

    fn unary(&self, unary: &UnaryOp<'a>, span: Span) -> Expr<'a> {
        let expr = self.expression(&unary.expr);
        match unary.op {
            UnaryOpKind::Not => Expr::UnaryOp(Spanned::new(UnaryOp { op: UnaryOpKind::Not, expr }, span)),
            UnaryOpKind::Neg => call(operator::NEGATIVE, vec![expr], span),
        }
    }

    fn binary(&self, binary: &BinOp<'a>, span: Span) -> Expr<'a> {
        let (left, right) = (self.expression(&binary.left), self.expression(&binary.right));
        let function = match binary.op {
            BinOpKind::ScAnd | BinOpKind::ScOr => {
                // minijinja computes two constants itself, and returns false for any false value.
                return match left.as_const().map(|value| value.is_true() == matches!(binary.op, BinOpKind::ScAnd)) {
                    Some(true) => right,
                    Some(false) => left,
                    None => Expr::BinOp(Spanned::new(BinOp { op: binary.op, left, right }, span)),
                };
            }
            BinOpKind::Add => operator::ADD,
            BinOpKind::Sub => operator::SUBTRACT,
            BinOpKind::Mul => operator::MULTIPLY,
            BinOpKind::Div => operator::DIVIDE,
            BinOpKind::FloorDiv => operator::FLOOR_DIVIDE,
            BinOpKind::Rem => operator::REMAINDER,
            BinOpKind::Pow => operator::POWER,
            BinOpKind::Concat => operator::CONCAT,
            BinOpKind::Eq => return compared(left, "==", right, span),
            BinOpKind::Ne => return compared(left, "!=", right, span),
            BinOpKind::Lt => return compared(left, "<", right, span),
            BinOpKind::Lte => return compared(left, "<=", right, span),
            BinOpKind::Gt => return compared(left, ">", right, span),
            BinOpKind::Gte => return compared(left, ">=", right, span),
            BinOpKind::In => return compared(left, "in", right, span),
        };
        call(function, vec![left, right], span)
    }

    fn comparison(&self, comparison: &Compare<'a>, span: Span) -> Expr<'a> {
        let mut chain = vec![self.expression(&comparison.expr)];
        for step in &comparison.ops {
            let operator = match step.op {
                CompareOpKind::Eq => "==",
                CompareOpKind::Ne => "!=",
                CompareOpKind::Lt => "<",
                CompareOpKind::Lte => "<=",
                CompareOpKind::Gt => ">",
                CompareOpKind::Gte => ">=",
                CompareOpKind::In => "in",
                CompareOpKind::NotIn => "not in",
            };
            chain.extend([constant(operator, span), self.expression(&step.expr)]);
        }
        call(operator::COMPARE, chain, span)
    }

    fn called(&self, called: &Spanned<Call<'a>>) -> Spanned<Call<'a>> {
        let mut args = self.arguments(&called.args);
        let expr = match &called.expr {
            Expr::GetAttr(method) => {
                let expr = self.expression(&method.expr);
                Expr::GetAttr(Spanned::new(GetAttr { expr, name: method.name }, method.span()))
            }
            Expr::Var(name) => {
                args.extend(self.passed(name.id, &called.args, called.span()));
                var(name.id, called.expr.span())
            }
            other => self.expression(other),
        };
        Spanned::new(Call { expr, args }, called.span())
    }

    /// The hidden arguments that tell a macro which parameters are passed.
    fn passed(&self, name: &str, arguments: &[CallArg<'a>], span: Span) -> Vec<CallArg<'a>> {
        let num_positional = arguments.iter().filter(|argument| matches!(argument, CallArg::Pos(_))).count();
        let is_named = |parameter: &str| {
            arguments.iter().any(|argument| matches!(argument, CallArg::Kwarg(name, _) if *name == parameter))
        };
        let parameters = self.macros.get(name).map(Vec::as_slice).unwrap_or_default();
        let parameters = parameters.iter().enumerate();
        let passed = parameters.filter(|(index, (parameter, _))| *index < num_positional || is_named(parameter));
        passed.filter_map(|(_, (_, hidden))| Some(CallArg::Kwarg((*hidden)?, constant(true, span)))).collect()
    }

    fn arguments(&self, arguments: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
        let rewritten = |argument: &CallArg<'a>| match argument {
            CallArg::Pos(value) => CallArg::Pos(self.expression(value)),
            CallArg::Kwarg(name, value) => CallArg::Kwarg(name, self.expression(value)),
            CallArg::PosSplat(value) => CallArg::PosSplat(self.expression(value)),
            CallArg::KwargSplat(value) => CallArg::KwargSplat(self.expression(value)),
        };
        arguments.iter().map(rewritten).collect()
    }
}

fn compared<'a>(left: Expr<'a>, operator: &'static str, right: Expr<'a>, span: Span) -> Expr<'a> {
    call(operator::COMPARE, vec![left, constant(operator, span), right], span)
}
