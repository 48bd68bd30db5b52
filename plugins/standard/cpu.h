// Sums, gathers and concatenation of rows: the C++ counterpart of triton_rows.py. Rows of any type
// are moved as bytes.

inline int64_t size_of(Type type) {
  switch (type) {
    case Type::i8: case Type::u8: return 1;
    case Type::f16: return 2;
    case Type::i64: return 8;
    default: return 4;
  }
}

struct Add : Kernel {
  Argument left, right, y;
  int64_t width, left_stride, right_stride;
  Add(const Variant& v)
      : left(v, "a"), right(v, "b"), y(v, "y"), width(v.integer("WIDTH")),
        left_stride(v.integer("A_STRIDE")), right_stride(v.integer("B_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(2 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const float* l = left.in<const float>(a) + row * left_stride;
        const float* r = right.in<const float>(a) + row * right_stride;
        blocks(width, [&](int64_t i, int n) {
          store_some(y.in<float>(a) + row * width + i, load_some(l + i, n) + load_some(r + i, n), n);
        });
      }
    });
  }
};

struct GatherColumns : Kernel {
  Argument x, columns, y;
  int64_t width, x_stride;
  GatherColumns(const Variant& v)
      : x(v, "x"), columns(v, "columns"), y(v, "y"), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")) {}
  template <class T, class I> void gather(const Value* a, int64_t rows) const {
    const I* at = columns.in<const I>(a);
    for (int64_t row = 0; row < rows; row++) {
      const T* in = x.in<const T>(a) + row * x_stride;
      T* out = y.in<T>(a) + row * width;
      for (int64_t i = 0; i < width; i++) out[i] = in[at[i]];
    }
  }
  template <class T> void by_index(const Value* a, int64_t rows) const {
    columns.type == Type::i64 ? gather<T, int64_t>(a, rows) : gather<T, int32_t>(a, rows);
  }
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    switch (size_of(x.type)) {
      case 1: return by_index<uint8_t>(a, grid[0]);
      case 2: return by_index<uint16_t>(a, grid[0]);
      case 8: return by_index<uint64_t>(a, grid[0]);
      default: return by_index<uint32_t>(a, grid[0]);
    }
  }
};

struct GatherRows : Kernel {
  Argument x, rows, y, B;
  int64_t width, x_stride;
  GatherRows(const Variant& v)
      : x(v, "x"), rows(v, "rows"), y(v, "y"), B(v, "B"), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    int64_t batch = B.integer(a), size = size_of(x.type);
    for (int64_t row = 0; row < grid[0]; row++) {
      int64_t from = rows.in<const int32_t>(a)[row / batch] * batch + row % batch;
      std::memcpy(y.in<char>(a) + row * width * size, x.in<const char>(a) + from * x_stride * size,
                  size_t(width * size));
    }
  }
};

struct Concat : Kernel {
  Argument left, right, y;
  int64_t left_width, right_width, left_stride, right_stride;
  Concat(const Variant& v)
      : left(v, "a"), right(v, "b"), y(v, "y"), left_width(v.integer("A_WIDTH")),
        right_width(v.integer("B_WIDTH")), left_stride(v.integer("A_STRIDE")),
        right_stride(v.integer("B_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    int64_t size = size_of(y.type), first = left_width * size, second = right_width * size;
    for (int64_t row = 0; row < grid[0]; row++) {
      char* out = y.in<char>(a) + row * (first + second);
      std::memcpy(out, left.in<const char>(a) + row * left_stride * size, size_t(first));
      std::memcpy(out + first, right.in<const char>(a) + row * right_stride * size, size_t(second));
    }
  }
};

KERNEL("rows.add", Add)
KERNEL("rows.gather_columns", GatherColumns)
KERNEL("rows.gather_rows", GatherRows)
KERNEL("rows.concat", Concat)
