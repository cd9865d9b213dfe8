//! Packing of quantized weights.

use super::linear::{MAX_ELEMENTS, PackedLinear};
use super::view::View;
use super::{Kernels, require};
use crate::element::Element;
use crate::linear::{self, Format, InputBits, Linear, Number, QuantizedRows, Segment};
use crate::pool::{Pool, Source};
use crate::simd::Float8;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// A quantized weight that is being packed, from its first row on.
#[pyclass]
pub(super) struct QuantizedPacking {
    pool: Pool,
    packed: Option<linear::QuantizedLinear>,
    num_filled: usize,
}

/// (rows, bits, group, offset, whether there are mins or zero points, dtype of scales and mins, dtype of zero points or None, what codes of
/// 4 bits stand for or None, what a code is)
pub(super) type SegmentParts = (usize, usize, usize, i32, bool, String, Option<String>, Option<[i8; 16]>, String);

impl QuantizedPacking {
    pub(super) fn new(
        kernels: &Kernels,
        segments: &[SegmentParts],
        in_features: usize,
        bias: Option<&View<'_, Element, 1>>,
        gated: bool,
        input_bits: usize,
    ) -> PyResult<QuantizedPacking> {
        let input_bits = match input_bits {
            8 => InputBits::Eight,
            16 => InputBits::Sixteen,
            other => return Err(PyValueError::new_err(format!("inputs have {other} bits, must have 8 or 16"))),
        };
        let mut checked = Vec::with_capacity(segments.len());
        let mut out_features = 0;
        for &(num_rows, bits, group, offset, has_mins, ref number, ref zeros, table, ref code) in segments {
            let number = number_of("scales", number)?;
            let zeros = zeros.as_deref().map(|zeros| number_of("zero points", zeros)).transpose()?;
            let float = match code.as_str() {
                "integer" => None,
                "e4m3fn" => Some(Float8::E4m3fn),
                "e5m2" => Some(Float8::E5m2),
                other => return Err(PyValueError::new_err(format!("a code cannot be {other}"))),
            };
            require(matches!(bits, 2..=6 | 8), || format!("a code has {bits} bits, must have 2 to 6 or 8"))?;
            require(group == 16 || (group > 0 && group.is_multiple_of(32)), || {
                format!("a group has {group} features, must have 16 or a multiple of 32")
            })?;
            require((0..256).contains(&offset), || format!("the offset is {offset}, must be a code"))?;
            require((1..=MAX_ELEMENTS).contains(&num_rows), || format!("a segment has {num_rows} rows"))?;
            require(table.is_none() || (bits == 4 && offset == 0 && !has_mins), || {
                format!(
                    "a table goes with codes of 4 bits and without an offset or mins, not with {bits} bits, {offset}"
                )
            })?;
            require(float.is_none() || (bits == 8 && offset == 0 && !has_mins), || {
                format!("a code of 8-bit floats has 8 bits, no offset and no mins, not {bits} bits and {offset}")
            })?;
            out_features += num_rows;
            // Tables have unsigned bytes in the kernels.
            let offset = if table.is_some() { 128 } else { offset };
            let table = table.map(|table| table.map(|number| number.cast_unsigned() ^ 128));
            let format = Format { bits, group, offset, table, float, has_mins, number, zeros };
            let has_good_zeros = zeros
                .is_none_or(|zeros| !matches!(zeros, Number::I8 | Number::Power) && has_mins && !format.has_factors());
            require(number != Number::U8 && has_good_zeros, || {
                format!("scales as {number:?} do not go with zero points as {zeros:?}")
            })?;
            checked.push(Segment { num_rows, format });
        }
        let elements = out_features.checked_mul(in_features).filter(|elements| (1..=MAX_ELEMENTS).contains(elements));
        require(elements.is_some(), || format!("a weight cannot have the shape {:?}", [out_features, in_features]))?;
        require(!gated || out_features.is_multiple_of(2), || {
            format!("a gated layer has {out_features} rows, must be an even number")
        })?;
        let bias = match bias {
            Some(bias) => bias.expect("bias", [out_features])?.source("bias")?.at(0),
            None => std::ptr::null(),
        };
        // SAFETY: the bias is null or has `out_features` elements.
        let packed = unsafe {
            linear::QuantizedLinear::new(&kernels.arena, &checked, in_features, bias, gated, input_bits, kernels.amx)
        };
        let packed = packed.map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => PyValueError::new_err(error.to_string()),
            _ => PyOSError::new_err(format!("no memory for a packed weight: {error}")),
        })?;
        Ok(QuantizedPacking { pool: kernels.pool, packed: Some(packed), num_filled: 0 })
    }
}

#[pymethods]
impl QuantizedPacking {
    /// Packs the next rows, which are of one segment: codes [rows, in_features]; numbers: scales, and mins or zero points if there are any,
    /// each [rows, groups]; factors: of scales and mins, if they are integers, each [rows, super-groups].
    fn add_rows(
        &mut self,
        py: Python<'_>,
        codes: View<'_, u8, 2>,
        numbers: Vec<View<'_, f32, 2>>,
        factors: Vec<View<'_, f32, 2>>,
    ) -> PyResult<()> {
        let Some(packed) = &self.packed else {
            return Err(PyValueError::new_err("the weight is complete"));
        };
        let ([num_rows, _], first, pool) = (codes.shape(), self.num_filled, self.pool);
        if num_rows == 0 {
            return Ok(());
        }
        require(num_rows <= packed.out_features() - first, || {
            format!("codes has {num_rows} rows, the weight lacks {}", packed.out_features() - first)
        })?;
        let format = packed.format_of(first);
        require(format == packed.format_of(first + num_rows - 1), || "rows are of several segments".to_owned())?;
        let num_kinds = format.num_kinds();
        let num_factors = if format.has_factors() { num_kinds } else { 0 };
        require(numbers.len() == num_kinds && factors.len() == num_factors, || {
            format!("{} numbers and {} factors do not go with {format:?}", numbers.len(), factors.len())
        })?;
        let columns = packed.in_features();
        let groups = [num_rows, columns.div_ceil(format.group)];
        let super_groups = [num_rows, columns.div_ceil(linear::SUPER_GROUP)];
        let rows = QuantizedRows {
            codes: codes.expect("codes", [num_rows, columns])?.source("codes")?,
            numbers: addresses("numbers", &numbers, groups)?,
            factors: addresses("factors", &factors, super_groups)?,
            num_rows,
        };
        let greatest = codes.elements("codes")?.iter().copied().max().unwrap_or(0);
        require(usize::from(greatest) >> format.bits == 0, || {
            format!("codes contains {greatest}, which has more than {} bits", format.bits)
        })?;
        // SAFETY: the rows are inside the weight and as long as its rows; nothing else has a reference to the weight yet.
        py.detach(|| unsafe { packed.fill(&pool, rows, first) });
        self.num_filled += num_rows;
        Ok(())
    }

    /// The layer, once all rows are packed.
    fn finish(&mut self) -> PyResult<PackedLinear> {
        let num_filled = self.num_filled;
        match self.packed.take_if(|packed| packed.out_features() == num_filled) {
            Some(packed) => Ok(PackedLinear::new(self.pool, Linear::Quantized(packed))),
            None => Err(PyValueError::new_err(format!("{num_filled} rows were packed, which are not the weight's"))),
        }
    }
}

/// How scales or zero points are stored, by the name in `QuantFormat`.
fn number_of(what: &str, name: &str) -> PyResult<Number> {
    match name {
        "float16" => Ok(Number::F16),
        "bfloat16" => Ok(Number::Bf16),
        "float32" => Ok(Number::F32),
        "int8" => Ok(Number::I8),
        "uint4" => Ok(Number::U4),
        "uint8" => Ok(Number::U8),
        "e8m0" => Ok(Number::Power),
        other => Err(PyValueError::new_err(format!("{what} cannot be stored as {other}"))),
    }
}

/// The addresses of at most two tensors of this shape; null for those that are not there.
fn addresses(name: &str, views: &[View<'_, f32, 2>], shape: [usize; 2]) -> PyResult<[Source<f32>; 2]> {
    let mut addresses = [Source::new(std::ptr::null()); 2];
    for (address, view) in addresses.iter_mut().zip(views) {
        *address = view.expect(name, shape)?.source(name)?;
    }
    Ok(addresses)
}
