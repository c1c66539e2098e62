// activate(): gate and up, side by side in blocks of kPanelWidth, to the activations of the next product.

// Below this a sigmoid is zero, whatever it is multiplied with: -infinity times zero must not be NaN.
constexpr float kVanishes = -128.0f;

// x / (1 + e^-z)
NUMA_MOE_INLINE Vector multiply_sigmoid(Vector x, Vector z) {
  return select(less(z, broadcast(kVanishes)), broadcast(-0.0f), multiply(x, sigmoid(z)));
}

template <Activation kActivation>
NUMA_MOE_INLINE Vector activate_gate(Vector gate, Vector alpha, Vector limit) {
  switch (kActivation) {
    case Activation::kSilu: return multiply_sigmoid(gate, gate);
    case Activation::kGelu:
      return select(less(gate, broadcast(kVanishes)), broadcast(-0.0f),
                    multiply(gate, normal_distribution(gate)));
    case Activation::kGeluTanh: {
      // (1 + tanh y) / 2 = sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3)
      const Vector factor =
          fused_multiply_add(multiply(gate, gate), broadcast(0x1.2444f2p-4f), broadcast(0x1.988454p+0f));
      return multiply_sigmoid(gate, multiply(gate, factor));
    }
    case Activation::kRelu: return at_least(gate, zero());
    case Activation::kReluSquared: {
      const Vector positive = at_least(gate, zero());
      return multiply(positive, positive);
    }
    case Activation::kSwigluOai: {
      const Vector clamped = at_most(gate, limit);
      return multiply_sigmoid(clamped, multiply(alpha, clamped));
    }
    case Activation::kSiluClampInput: {
      const Vector clamped = at_most(gate, limit);
      return multiply_sigmoid(clamped, clamped);
    }
    case Activation::kSiluClampOutput: return at_most(multiply_sigmoid(gate, gate), limit);
  }
  return gate;
}

template <Activation kActivation>
NUMA_MOE_INLINE Vector activate_up(Vector up, Vector limit) {
  switch (kActivation) {
    case Activation::kSwigluOai:
      return add(at_least(at_most(up, limit), subtract(zero(), limit)), broadcast(1.0f));
    case Activation::kSiluClampInput:
    case Activation::kSiluClampOutput: return at_least(at_most(up, limit), subtract(zero(), limit));
    default: return up;
  }
}

template <class Storage, Activation kActivation>
static void activate_rows(const ActivateArgs& args) {
  const Vector alpha = broadcast(args.alpha);
  const Vector limit = broadcast(args.limit);
  const int64_t block_width = args.gated ? 2 * kPanelWidth : kPanelWidth;
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* gate_up = args.gate_up + row * args.gate_up_stride;
    auto* out = static_cast<typename Storage::Element*>(args.out) + row * args.out_stride;
    const float* bias = args.bias;
    for (int64_t block = 0; block < args.num_blocks; ++block) {
      for (int column = 0; column < kPanelWidth; column += kLanes) {
        Vector gate = load(gate_up + column);
        if (bias != nullptr) gate = add(gate, load(bias + column));
        Vector result = activate_gate<kActivation>(gate, alpha, limit);
        if (args.gated) {
          Vector up = load(gate_up + kPanelWidth + column);
          if (bias != nullptr) up = add(up, load(bias + kPanelWidth + column));
          result = multiply(activate_up<kActivation>(up, limit), result);
        }
        Storage::write(out + column, result);
      }
      gate_up += block_width;
      if (bias != nullptr) bias += block_width;
      out += kPanelWidth;
    }
  }
}

template <class Storage>
static void activate(const ActivateArgs& args) {
  switch (args.activation) {
    case Activation::kSilu: return activate_rows<Storage, Activation::kSilu>(args);
    case Activation::kGelu: return activate_rows<Storage, Activation::kGelu>(args);
    case Activation::kGeluTanh: return activate_rows<Storage, Activation::kGeluTanh>(args);
    case Activation::kRelu: return activate_rows<Storage, Activation::kRelu>(args);
    case Activation::kReluSquared: return activate_rows<Storage, Activation::kReluSquared>(args);
    case Activation::kSwigluOai: return activate_rows<Storage, Activation::kSwigluOai>(args);
    case Activation::kSiluClampInput: return activate_rows<Storage, Activation::kSiluClampInput>(args);
    case Activation::kSiluClampOutput: return activate_rows<Storage, Activation::kSiluClampOutput>(args);
  }
}
